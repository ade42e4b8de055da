"""Parquet files: footers and row groups by ranged reads."""
