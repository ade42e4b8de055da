"""Private implementation of headrace.

Names here may change in any release.
"""
