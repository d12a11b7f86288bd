from kestrel_cli.app import main

main()
