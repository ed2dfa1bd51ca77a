"""Images, for models that embed them, most together with texts.

    files       an image file: its format and size from the header, and its pixels, within limits; large WebP images
                are decoded without the GIL
    parts       the parts of a file that Pillow needs
    memory      memory of large images, taken and freed without the GIL
    pixels      the same pixels as by the model's own image processor, bit for bit
    waiting     decodes waiting pictures on a few threads ahead of their batch
    inputs      pictures and texts: tokenizer, batches
    model       the image half of a model, both halves as one model, and models of images without texts
    pages       models of queries and page images: a vector for each token
    chats       models that read texts and images in one input
    chat_texts  their token ids, in a chat
    runner      runs batches with pictures

Models of texts alone import nothing of this.
"""
