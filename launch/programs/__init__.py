"""Programs that the scripts of launch run, and what runs them: run.py, and options.py for --help."""
