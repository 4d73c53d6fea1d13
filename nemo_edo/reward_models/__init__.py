"""Process reward models: training, published formats, scoring of stored responses. Import from the modules."""
