"""One candidate: launch, rounds, measurement, outcome; and what is left of it on disk."""
