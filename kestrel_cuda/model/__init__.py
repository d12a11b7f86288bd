"""What a Qwen3-VL computes, written over the backend's steps."""
