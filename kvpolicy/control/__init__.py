"""What a controller sees and says, and the pure function that makes any proposal feasible."""
