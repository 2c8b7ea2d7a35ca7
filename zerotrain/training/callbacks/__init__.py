"""What happens beside the steps of a loop."""
