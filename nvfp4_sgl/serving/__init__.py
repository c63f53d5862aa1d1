"""The model as a plugin of SGLang."""
