"""What a server measures of itself, and how it gives freed memory back."""
