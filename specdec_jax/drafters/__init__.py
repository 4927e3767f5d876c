"""What proposes guesses."""
