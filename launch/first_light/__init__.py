"""First light: what ``launch/check_gpu`` runs on a Blackwell GPU, from single instructions to a server.

Every step is a process of its own with a time limit (``steps``). It keeps a journal of what it has begun and ended
(``journal``), so that a wrong result, a crash and a hang are all told by name (``outcome``), and leaves what somebody
else needs to find the mistake in one folder (``evidence``).
"""
