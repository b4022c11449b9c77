"""Profiles: YAML files read into the domain's Profile, with errors that name the line and the hint."""

from tuner.profile.load import load_profile, parse_profile

__all__ = ["load_profile", "parse_profile"]
