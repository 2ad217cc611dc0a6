"""The data sets on which published weights were trained, by their names in `weights.tsv`.

`tests/interop/write_weights.py` maps the words of timm's tags to these names.
"""

# Short descriptions of the data sets, based on the authors' descriptions. "Pairs" are pairs of an
# image and a text.
DATA_SETS = {
    "ImageNet-1k": "1.28 million photographs of 1,000 classes, of the challenge of 2012",
    "ImageNet-12k": "the 11,821 classes of ImageNet-21k that have enough images",
    "ImageNet-21k": "14 million photographs of 21,841 classes; also called ImageNet-22k",
    "ImageNet-21k-P": "11,221 classes of ImageNet-21k, cleaned",
    "Bamboo": "69 million photographs of a hierarchy of classes, 115,217 of them in the head",
    "LVD-142M": "142 million images of the web like those of curated sets; Meta's, not published",
    "LVD-1689M": "1,689 million images, chosen of a crawl of the web; Meta's, not published",
    "SAT-493M": "493 million images of the earth from satellites; Meta's, not published",
    "WIT-400M": "400 million pairs from the web; OpenAI's, not published",
    "LAION-400M": "400 million pairs of the web in English",
    "LAION-2B": "2.3 billion pairs of the web in English",
    "LAION-Aesthetic": "the part of LAION-2B, some 900 million pairs, that a model finds pleasing",
    "YFCC-15M": "15 million pairs of Flickr, of YFCC-100M",
    "DataComp-1B": "1.4 billion pairs of the web, chosen of 12.8 billion",
    "DFN-2B": "2 billion pairs of the web, chosen by a network; Apple's",
    "DFN-5B": "5 billion pairs of the web, chosen by a network; Apple's",
    "DFNDR-2B": "DFN-2B with outputs of several models for each image; Apple's",
    "MetaCLIP-400M": "400 million pairs of the web, balanced by their words; Meta's",
    "MetaCLIP-2.5B": "2.5 billion pairs of the web, balanced by their words; Meta's",
    "Altogether": "pairs of MetaCLIP with texts that a model rewrote; Meta's",
    "MetaCLIP 2": "pairs of the web in all languages, balanced by their words; Meta's",
    "WebLI": "10 billion images of the web with texts in 100 languages; Google's, not published",
    "PaliGemma's": "the mixture of tasks on which PaliGemma was pre-trained; Google's",
    "PaliGemma's tasks": "a mixture of the tasks to which PaliGemma was transferred",
    "OCR-VQA": "questions on covers of books",
    "RefCOCO": "words for objects in photographs, here to be segmented",
    "DOCCI": "15,000 photographs with long descriptions",
    "Merged-30M": "30 million images, of ImageNet-21k, Conceptual Captions, Object365 and others",
    "Merged-38M": "38 million images, those of Merged-30M and more",
    "Merged-2B": "1.6 billion pairs of LAION-2B and 0.4 billion of COYO-700M",
    "BEiT-3's": "ImageNet-21k, 160 GB of text, and pairs of LAION, COYO-700M and CC15M",
    "COCO and Visual Genome": "photographs with descriptions of their contents and places",
    "AIMv2's": "pairs of DFN-2B, of COYO and of Apple's own, some with texts that a model wrote",
    "PE's": "5.4 billion pairs of the web, chosen as MetaCLIP's are, and videos; Meta's",
    "C-RADIO's": "images of NVIDIA's own, which several models are distilled on",
    "InternVL's": "a mixture of many sets, of photographs, documents and pairs; OpenGVLab's",
}
