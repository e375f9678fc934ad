"""What goes beyond requests and answers: plots, sources of prompts, samples, labels."""
