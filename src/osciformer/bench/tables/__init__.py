"""Tables of models: ours and rivals, trained and chosen by one protocol."""
