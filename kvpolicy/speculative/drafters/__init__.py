"""The drafters of this project: DFlash, DFlash2 and DSpark, on one body."""
