"""Programs explained in words and pictures: their construction, their pace, the rivals that lost."""
