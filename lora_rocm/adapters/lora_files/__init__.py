"""Adapter files of all trainers: reads them, translates their module names, and starts adapters from them."""
