"""What one caller does, and what it does to others: a test for each fault that was seen."""
