"""What every preset must prove, unseen: nothing here names a codec. See docs/add-a-codec.md."""
