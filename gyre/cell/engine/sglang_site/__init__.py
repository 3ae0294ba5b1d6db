"""What runs inside a SGLang server, in its own Python: this folder is on its PYTHONPATH, and nothing in it
needs Gyre to be installed there. `gyre_hicache` is the class that SGLang loads, `gyre_pages` what it keeps.
"""
