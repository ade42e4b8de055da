"""What single trainers need: one module for each, which nothing else imports, and which alone imports the trainer."""
