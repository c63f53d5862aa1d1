"""How the model plugs into SGLang."""
