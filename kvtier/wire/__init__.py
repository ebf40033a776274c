"""What travels: messages, their codec, and the plans between planner and movers."""
