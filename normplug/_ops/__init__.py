"""The routes that carry a norm out, one module each; `functional` chooses between them."""
