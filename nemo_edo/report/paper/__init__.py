"""The paper's tables alongside measured numbers."""
