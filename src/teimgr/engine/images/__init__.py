"""Images of models that embed them, most beside texts.

    files     an image file: its format and size from the header, and its pixels, within limits
    memory    memory of large images, taken and freed without the GIL
    webp      large WebP images, decoded without the GIL
    pixels    pixels as the model's own image processor makes them, bit for bit
    waiting   decodes waiting pictures on a few threads ahead of their batch
    inputs    pictures beside texts: tokenizer, batches
    model     the image half of a model, and both halves as one model
    pages     models of queries and page images: a vector for each token
    alone     models of images without texts
    chats     models that read texts and images in one input
    chat_texts    their token ids, in the words of a chat
    runner    batches with pictures on their way through the model

Nothing of this is imported for a model of texts alone.
"""
