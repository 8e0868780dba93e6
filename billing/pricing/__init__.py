"""Rate cards, price books, and the price of token counts."""
