"""`regress`, `compare` and `bench`: their design, the verdict, and what they leave for people and for CI."""
