"""Rules that set environment variables and settings for a machine, mitigations after failures, and the mitigations'
store.
"""
