"""What the ranks of a run execute, and how rank 0's controller calls it."""
