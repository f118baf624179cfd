"""Archives and folders of images: walked, indexed, extracted.

member_names   names of members that may be written
listing        from paths to images in sample order
class_folders  classes and images of an extracted folder
labels         the classes of validation images
tar_header     one entry of a tar, read with care
tar_walk       all headers of a tar, from one place or from many
tar_images     the images of a tar, whatever its shape
stream_walk    the same of a tar that is read once, from front to back
zip_directory  the files of a zip, and their bytes
units          a tar cut into runs of neighbouring images
unit_sums      a crc32 for each of them, from one pass
block_sums     sums of 1 MiB blocks, ahead of a reader
index_file     TAR.index, the file
index          the index of a tar: found, built, checked
header_check   the headers of a tar against its index, image by image
output_folder  where classes are extracted to, safe at any kill
copy_images    images into files, each written once
write_classes  threads that write classes
extract_gzip   a .tar.gz, from front to back
extract        an archive into class folders
"""
