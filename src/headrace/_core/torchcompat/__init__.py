"""Everything that depends on details of torch, so that a new release of torch concerns this package only."""
