"""What is stored of responses and conversations; requests, views and the admin import it."""
