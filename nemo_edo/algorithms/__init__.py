"""The paper's algorithms over Protocols: nothing here knows Megatron, a server or a file format."""
