"""Routes: each carries out the calls of a norm in one way. `functional` and `modules` use them."""
