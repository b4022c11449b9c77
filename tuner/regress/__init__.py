"""The nightly watch: a pure verdict, the nights that feed it, and what they leave for people and for CI."""
