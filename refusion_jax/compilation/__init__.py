"""Compiling for TPUs that are not there, and reading what came of it."""
