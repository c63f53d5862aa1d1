"""What the scripts of launch run, and what runs it: run.py, and options.py for --help."""
