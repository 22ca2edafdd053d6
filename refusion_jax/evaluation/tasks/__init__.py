"""Task files whose data lie in a local folder; everything else in them is the harness's."""
