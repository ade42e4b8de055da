"""Interface of datasets: kinds, base classes, iterators, composition."""
