"""Shared by several test modules. Tests import from here and from their own folder, never from another test."""
