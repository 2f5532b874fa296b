"""docs follow"""
