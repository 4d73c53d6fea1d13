"""Ways of bringing a trained policy's weights to the engine that samples from it: a transport each."""
