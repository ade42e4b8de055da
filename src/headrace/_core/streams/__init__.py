"""The interface of datasets: kinds, base classes, iterators, composition."""
