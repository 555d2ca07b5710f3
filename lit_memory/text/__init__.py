"""Text for the tasks: a ``Corpus`` of books (``corpus.py``), token ids (``tokenizers.py``), contexts of any length
(``haystack.py``), and prose for those who have no books (``noise.py``)."""
