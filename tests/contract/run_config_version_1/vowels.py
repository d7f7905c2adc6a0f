def share(request):
    text = "".join(turn.text for turn in request.turns)
    return sum(c in "aeiou" for c in text) / max(1, len(text))
