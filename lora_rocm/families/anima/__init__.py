"""Anima."""
