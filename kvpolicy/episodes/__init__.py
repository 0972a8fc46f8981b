"""Episodes: a scenario's load served by the engine or its twin, decision by decision."""
