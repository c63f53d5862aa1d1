"""The DeepSeek-V4 decoder: modules that hold packed weights and call ops. Knows nothing of SGLang."""
