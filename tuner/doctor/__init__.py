"""What on this machine, in this profile or at a server would make a sweep fail or lie; and the hint."""

from tuner.doctor.examine import Request, examine
from tuner.doctor.line import Line

__all__ = ["Line", "Request", "examine"]
