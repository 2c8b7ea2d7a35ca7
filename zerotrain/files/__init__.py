"""Files as the whole house reads them, and output as it writes it. Nothing here imports torch or another part of it."""
