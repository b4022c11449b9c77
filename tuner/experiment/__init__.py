"""The runner that measures settings on engine starts, and the store on disk. Knows no design."""
