"""A small DeepSeek-V4 that is trained from nothing on recalling facts: task, network, training, export, figures."""
